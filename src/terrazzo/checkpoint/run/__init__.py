"""Carrying plans out: sessions of ranks that act together, staging, saving in the background."""
