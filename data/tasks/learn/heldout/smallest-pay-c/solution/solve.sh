sqlite3 c.db 'select min(pay) from t' > answer.txt
