"""Operations: `table` has one entry for each; the other modules register theirs there, grouped by kind."""
