"""Model archives: read safely, checked before anything in them is opened, and written the same way twice."""
