"""The commands of `kvtide`, each registered on the application that `cli` builds."""
