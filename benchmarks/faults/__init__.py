"""Faults planted in tpplan one at a time, and the checks that must catch each of them."""
