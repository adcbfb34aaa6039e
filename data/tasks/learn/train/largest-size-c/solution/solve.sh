sqlite3 c.db 'select max(size) from t' > answer.txt
