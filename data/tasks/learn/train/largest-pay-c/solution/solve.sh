sqlite3 c.db 'select max(pay) from t' > answer.txt
