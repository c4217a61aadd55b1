"""Talking between ranks: axes of a mesh, collectives (plain and differentiable), and a control plane for bytes."""
