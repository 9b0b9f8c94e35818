"""text *reads and writes*: chat template, tokenizing, incremental detokenizing, stop strings."""
