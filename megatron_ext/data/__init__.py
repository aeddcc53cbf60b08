"""Data processing from texts on disk to the rows that training reads; nothing here imports Megatron.

text/     texts, conversations, tokenizers       build/    offline: texts -> PREFIX.bin, .idx, .json
packing/  offline: documents -> plans of rows    rows/     while training: documents or plans -> rows
indexed   .bin, .idx, .json, read and written
"""
