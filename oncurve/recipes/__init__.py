"""Which experiments come with the package?"""
