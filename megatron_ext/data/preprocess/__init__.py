"""Offline creation of data sets: tokenizing documents into .bin and .idx."""
