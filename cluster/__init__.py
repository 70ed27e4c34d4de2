"""The domain and what runs where: types, configuration, placement, state store, data-plane transport."""
