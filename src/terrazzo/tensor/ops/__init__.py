"""Operations: `table` is the one place that knows them all, the other modules put theirs into it, kind by kind."""
