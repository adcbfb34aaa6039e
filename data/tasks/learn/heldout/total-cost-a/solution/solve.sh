awk -F, '{s += $3} END {print s}' a.csv > answer.txt
