"""Files in, files out: Arrow schemas, row identity, published units.  Knows no models, engine or pipeline."""
