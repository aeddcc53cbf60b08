"""Text processing: documents from files, tokenizers, conversations as text, and the metadata of data sets."""
