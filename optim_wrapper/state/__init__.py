"""What a model, its optimizer and the extras hold, enumerated by name and divided into units."""
