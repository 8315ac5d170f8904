"""`oncurve serve`: sampling for a trainer on another machine."""
