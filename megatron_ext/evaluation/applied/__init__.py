"""What a model does with documents, examples, books and programs, asked from files as they are published."""
