"""PyTorch's items, planners and readers, where saves and loads meet them: they become rows and targets here."""
