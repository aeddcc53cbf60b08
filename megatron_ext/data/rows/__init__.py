"""Rows of tokens for training, each a pure function of the seed and the sample index.

    MixturePart              data sets, their weights and packing, from YAML or --data-path
      | IndexedSource        the tokens of its documents, memory-mapped
      | split_documents      the documents for training and for validation
      v
    RowDataset, PackedRows   sequences of n tokens: cut from shuffled documents, or according to a packing plan
      v
    LaidSequences            if n < L: as many as fill a row of L tokens
      v
    BlendedRows              the part that each sample comes from, so that token shares match the weights
      v
    TokenRow(tokens[L+1], document_ends, trained, weights)
      v
    assign_rows              with --balance-batches: which rank computes which row of the global batch

There are two different weights: a part's weight (`MixturePart.weight`) is its share of the tokens; a token's weight
(`TokenRow.weights`) is the factor of its loss.
"""
