"""What training reads: rows of tokens, each a pure function of the seed and the sample index.

    MixturePart              which data sets, by what weights, packed how: from YAML, or from --data-path
      | TokenSource          the tokens of its documents (engine's IndexedSource, memory-mapped)
      | split_documents      those of training, those of validation
      v
    RowDataset, PackedRows   sequences of n tokens: cut from shuffled documents, or as a packing plan says
      v
    LaidSequences            n < L: as many as fill a row of L tokens
      v
    BlendedRows              which part each sample comes from, so that tokens come in the ratio of the weights
      v
    TokenRow(tokens[L+1], document_ends, trained, weights)
      v
    deal_rows                with --balance-batches: which rank computes which row of the global batch

Two different weights: a part's (`MixturePart.weight`) is its share of the tokens; a token's (`TokenRow.weights`) is
the factor of its loss.
"""
