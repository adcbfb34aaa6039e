sqlite3 c.db 'select min(size) from t' > answer.txt
