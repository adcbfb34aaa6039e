sqlite3 c.db 'select sum(size) from t' > answer.txt
