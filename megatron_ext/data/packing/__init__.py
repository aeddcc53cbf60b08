"""Assignment of pieces of documents to rows: policies create plans offline, `PackedRows` reads them."""
