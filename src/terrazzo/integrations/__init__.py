"""Other people's programs: each module is for one library, and imports it when it is asked for."""
