"""Carry out plans: sessions of saves and loads on all ranks, staging, saving in the background."""
