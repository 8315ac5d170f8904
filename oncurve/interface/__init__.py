"""The public interface in Python: `oncurve.Trainer`, and the verbs of a loop of one's own."""
