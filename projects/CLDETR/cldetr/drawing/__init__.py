"""Boxes on images, and pictures of what training does with an image."""
