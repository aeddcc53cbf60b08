"""Long-context recall: prompts with what is to be found in them, and how answers are scored."""
