"""router *picks*: filters, scores, a picker."""
