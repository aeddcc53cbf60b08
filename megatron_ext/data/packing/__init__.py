"""Assignment of pieces of documents to rows: policies create plans offline, `data/rows/packed.py` reads them."""
