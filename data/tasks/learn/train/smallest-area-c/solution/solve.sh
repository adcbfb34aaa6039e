sqlite3 c.db 'select min(area) from t' > answer.txt
