"""Mathematical answers: text to tokens, tokens to typed values, and values compared by their types."""
