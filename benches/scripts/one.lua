-- What a script costs that does nothing.
return 1
