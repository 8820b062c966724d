"""The plain policies every better one is measured against."""
