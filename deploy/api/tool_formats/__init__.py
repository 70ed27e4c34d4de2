"""Forms in which model families write tool calls: a file for each family, and the `registry` of their names."""
