"""model *computes*: Hugging Face models on our paged KV pool, sampling, the simulated runner."""
