"""What a model has learned, measured."""
