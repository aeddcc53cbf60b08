"""Offline creation of data sets: gathering a corpus, and tokenizing documents into .bin and .idx."""
