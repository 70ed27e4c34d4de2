"""The dashboard: a page of static files, and the data that it reads."""
