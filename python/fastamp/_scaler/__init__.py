"""The parts of ``fastamp.GradScaler`` that are not the class: checks, reports, subclasses."""
