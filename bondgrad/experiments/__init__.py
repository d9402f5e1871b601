"""Runs that train networks through boxes, and what is made of their results."""
