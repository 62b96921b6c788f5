"""Tables, plots, pictures and pages of finished and unfinished runs."""
