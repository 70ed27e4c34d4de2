"""Training of drafters: prompts, answers by the target, distillation, evaluation, model card (``outrider train``)."""
