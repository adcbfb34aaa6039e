awk -F, '{s += $2} END {print s}' a.csv > answer.txt
