"""Two runs side by side: is a difference more than noise?"""
