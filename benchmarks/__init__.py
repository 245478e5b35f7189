"""Measurements and studies that no part of the product needs."""
