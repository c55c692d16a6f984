"""Text on both sides of the engine: templates, tokenizers, prompts, answers.  Layer 3b: no tensors, no Beam."""
