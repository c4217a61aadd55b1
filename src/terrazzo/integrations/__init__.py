"""Integrations with other libraries: one module for each, which imports the library when it is used."""
