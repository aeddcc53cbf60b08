"""Pages of one file: charts as SVG, light and dark, for telephones and wide screens; no scripts, no links."""
