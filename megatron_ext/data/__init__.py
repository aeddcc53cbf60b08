"""Data processing from texts on disk to the rows that training reads; nothing here imports Megatron.

text/     texts, conversations, tokenizers       preprocess/  offline: texts -> PREFIX.bin, .idx, .json
packing/  offline: documents -> plans of rows    rows/        while training: documents or plans -> rows
indexed   .bin, .idx, .json, read and written    row          a row, and the order in which rows are read
"""
