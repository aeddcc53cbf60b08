"""What text is: documents out of files, tokenizers, conversations as text, and a dataset's card."""
