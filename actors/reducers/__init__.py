"""Control reducers: how pending events become the controls of one tick. Found by entry point `worldline.reducers`."""
