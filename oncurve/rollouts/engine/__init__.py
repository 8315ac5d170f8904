"""How does the in-process engine sample many completions at once?"""
